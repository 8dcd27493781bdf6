"""Where config.json describes the text part of a model that also sees or hears. No torch."""

TEXT_CONFIGS = ("text_config", "llm_config")
