"""lm-eval's local-completions: batches of log-probabilities of given answers, and generated text.

The tasks and their documents are files that are written here: nothing comes from a hub. What
lm-eval makes of the server's log-probabilities has to agree with what the server says itself.
"""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
import requests
from lm_eval.tasks import TaskManager

url, model, folder = sys.argv[1:4]
NAMES = ["Anna", "Boris", "Clara", "David", "Emma", "Felix"]
DOCUMENTS = [
    {
        "question": f"<|user|>My name is {name}. What is my name?<|end|><|assistant|>",
        "choices": [f"Your name is {other}." for other in NAMES],
        "answer": place,
        "text": f"Your name is {name}.",
    }
    for place, name in enumerate(NAMES)
]
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
CHOICES = {
    **COMMON,
    "task": "choose",
    "output_type": "multiple_choice",
    "target_delimiter": "",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
GENERATED = {
    **COMMON,
    "task": "say",
    "output_type": "generate_until",
    "doc_to_target": "{{text}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}

with tempfile.TemporaryDirectory() as name:
    data = Path(name) / "documents.jsonl"
    data.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    for task in (CHOICES, GENERATED):
        task["dataset_kwargs"] = {"data_files": {"test": str(data)}, "cache_dir": name}
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "base_url": f"{url}/completions",
            "model": model,
            "tokenizer_backend": "huggingface",
            "tokenizer": folder,
            "num_concurrent": 2,
            "max_length": 2048,
        },
        batch_size=4,
        tasks=[CHOICES, GENERATED],
        task_manager=TaskManager(include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
print(results["results"])
# The reference model was taught just this.
assert results["results"]["choose"]["acc,none"] == 1.0, results["results"]
assert results["results"]["say"]["exact_match,none"] == 1.0, results["results"]

(sample,) = (s for s in results["samples"]["choose"] if s["doc_id"] == 0)
body = {"model": model, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
question, choice = DOCUMENTS[0]["question"], DOCUMENTS[0]["choices"][1]
said = requests.post(f"{url}/completions", json={**body, "prompt": question + choice}, timeout=60)
logprobs = said.json()["choices"][0]["logprobs"]
own = sum(
    value
    for value, offset in zip(logprobs["token_logprobs"], logprobs["text_offset"], strict=True)
    if len(question) <= offset < len(question + choice)
)
assert abs(sample["filtered_resps"][1][0] - own) < 0.05, (sample["filtered_resps"][1], own)
