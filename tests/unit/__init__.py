"""Modules by themselves, without servers; mirrors the source tree."""
