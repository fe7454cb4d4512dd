"""The pocket model: a 7.8M-parameter `qwen3_5` text model with an MTP head, for the demo and the tests.

The folder itself is what a loader reads (config.json, model.safetensors, tokenizer.json, chat_template.jinja);
`recipe/` made it and `results/` holds the figures of MODEL_CARD.md.
"""
