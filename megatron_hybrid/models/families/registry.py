"""All model families, by the model_type in config.json. A new one is a file beside this one, whose
class is a Family (llama.py is the shortest), and a line here."""

from __future__ import annotations

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.families.bailing_hybrid import BailingHybrid
from megatron_hybrid.models.families.bailing_linear import BailingLinear
from megatron_hybrid.models.families.bamba import Bamba
from megatron_hybrid.models.families.falcon_h1 import FalconH1
from megatron_hybrid.models.families.family import Family
from megatron_hybrid.models.families.glm5_next import Glm5Next
from megatron_hybrid.models.families.granite_moe_hybrid import GraniteMoeHybrid
from megatron_hybrid.models.families.inkling import INKLING_NAMES, Inkling
from megatron_hybrid.models.families.inkling2 import INKLING2_NAMES, Inkling2
from megatron_hybrid.models.families.jamba import Jamba
from megatron_hybrid.models.families.kimi_linear import KimiLinear
from megatron_hybrid.models.families.lfm2 import Lfm2
from megatron_hybrid.models.families.lfm3 import Lfm3
from megatron_hybrid.models.families.llama import Llama, Qwen3
from megatron_hybrid.models.families.mamba import Mamba, Mamba2
from megatron_hybrid.models.families.minimax import MiniMax
from megatron_hybrid.models.families.nemotron_h import NemotronH
from megatron_hybrid.models.families.olmo_hybrid import OlmoHybrid
from megatron_hybrid.models.families.qwen3_next import Qwen3Next, Qwen35
from megatron_hybrid.models.families.qwen4_exp import Qwen4Exp
from megatron_hybrid.models.families.recurrent_gemma import RecurrentGemma
from megatron_hybrid.models.families.rwkv import Rwkv
from megatron_hybrid.models.families.text_part import USUAL_NAMES, TextPart
from megatron_hybrid.models.families.xlstm import XLSTM
from megatron_hybrid.models.families.zamba import Zamba
from megatron_hybrid.models.families.zamba2 import Zamba2
from megatron_hybrid.models.families.zaya import Zaya

FAMILIES: tuple[Family, ...] = (
    NemotronH(),
    Bamba(),
    GraniteMoeHybrid(),
    FalconH1(),
    Zamba2(),
    Zamba(),
    Jamba(),
    Mamba(),
    Mamba2(),
    Qwen3Next(),
    Qwen35(),
    Qwen4Exp(),
    OlmoHybrid(),
    MiniMax(),
    BailingLinear(),
    Lfm2(),
    Lfm3(),
    KimiLinear(),
    BailingHybrid(),
    Inkling(),
    Inkling2(),
    Glm5Next(),
    RecurrentGemma(),
    Rwkv(),
    XLSTM(),
    Zaya(),
    Llama(),
    Qwen3(),
)
# Of models that also see or hear. How they call the text's weights where that is not usual:
_CAUSAL_LM = ((r"^language_model\.", ""),)  # a whole causal language model inside
_NEMO = (
    (r"^llm\.model\.embed_tokens\.", "model.embeddings."),
    (r"^llm\.model\.norm\.", "model.norm_f."),
    (r"^llm\.", ""),
    *USUAL_NAMES,
)
TEXT_PARTS: tuple[TextPart, ...] = (
    TextPart(
        Qwen35(),
        ("qwen3_5", "qwen3_5_moe", "minicpmv4_6", "minicpmv4_7", "intern_s2_preview"),
        tied=False,
    ),
    TextPart(Qwen35(), ("minicpm_ocr",), tied=True),
    TextPart(Glm5Next(), ("glm5_next",), tied=False),
    TextPart(Qwen4Exp(), ("qwen4_exp",), tied=False),
    TextPart(Lfm2(), ("lfm2_vl",), tied=True),
    TextPart(
        NemotronH(),
        ("nemotron_h_omni", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2"),
        names=_CAUSAL_LM,
    ),
    TextPart(NemotronH(), ("nemo_speechlm", "nemotron3_5_transcribe"), names=_NEMO, tied=False),
    TextPart(Inkling(), ("inkling_mm_model",), names=INKLING_NAMES),
    TextPart(Inkling2(), ("inkling2",), names=INKLING2_NAMES),
    TextPart(GraniteMoeHybrid(), ("granite_speech", "granite_speech_plus"), tied=True),
)
BY_MODEL_TYPE: dict[str, Family] = {
    **{name: family for family in FAMILIES for name in family.model_types},
    **{name: part for part in TEXT_PARTS for name in part.wholes},
}


def family_of(model_type: str) -> Family:
    """Raises ConfigurationError, which names all that there are, for one that is not."""
    family = BY_MODEL_TYPE.get(model_type)
    if family is None:
        raise ConfigurationError(
            f"Models of type {model_type!r} are not supported, only {', '.join(BY_MODEL_TYPE)} are."
        )
    return family
