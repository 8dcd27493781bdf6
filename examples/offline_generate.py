#!/usr/bin/env python
"""Five lines to a first token, with the model that ships with the package."""

from megatron_hybrid import LLM, SamplingParams

llm = LLM()  # or LLM("a/hugging-face/folder"), or a name on the hub: LLM("OWNER/NAME")
question = "The code of the gate is 7315, and the cat is called Pixel. What is the cat called?"
(out,) = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0.0))
print(out.text)
