"""The gateway: text in, text out.

OpenAI-style REST in front of the queue. It authenticates, validates, renders, tokenises, routes and enqueues, and turns
the journalled token stream back into text. Knows no device and no database: no torch, no SQL.
"""
