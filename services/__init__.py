"""Burstline's services: gateway, gpu_worker and cache_broker; they never import one another."""
