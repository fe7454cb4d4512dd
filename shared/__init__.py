"""What two or more services must agree on: protocol, transport, settings, telemetry, errors, time.

Knows no service, no device and no database; imports neither `services` nor `kernels`.
"""
