"""The pocket model's folder (files, template, tokenizer) and its recipe on tiny inputs."""
