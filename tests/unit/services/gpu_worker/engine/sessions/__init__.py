"""Tests of unit/services/gpu_worker/engine/sessions."""
