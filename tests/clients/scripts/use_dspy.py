"""dspy's JSONAdapter: the fields of a signature, read from an answer that follows their schema."""

import sys
from typing import Literal

import dspy
import litellm

url, model = sys.argv[1:3]
# Without this dspy asks only for any JSON object, as it does of all models it has not heard of.
litellm.register_model(
    {
        f"openai/{model}": {
            "litellm_provider": "openai",
            "mode": "chat",
            "supports_response_schema": True,
            "supports_function_calling": True,
        }
    }
)
lm = dspy.LM(
    f"openai/{model}",
    api_base=url,
    api_key="none",
    engine="litellm",
    temperature=0,
    max_tokens=200,
    cache=False,
)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())


class Judge(dspy.Signature):
    """Say whether the sentence is kind."""

    sentence: str = dspy.InputField()
    kind: bool = dspy.OutputField()
    tone: Literal["warm", "cold"] = dspy.OutputField()
    grade: Literal[1, 2, 3] = dspy.OutputField()


answer = dspy.Predict(Judge)(sentence="What a lovely day.")
assert isinstance(answer.kind, bool) and answer.grade in (1, 2, 3), answer
assert answer.tone in ("warm", "cold"), answer
(entry,) = lm.history
assert entry["usage"]["completion_tokens"] < 200, entry["usage"]
print(answer)
