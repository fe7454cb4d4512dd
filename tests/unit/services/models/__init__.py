"""Tests of services/models; mirrors its modules. `made_up` writes small GGUF files."""
