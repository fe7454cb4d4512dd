"""`make demo`: the whole line shown once, by the HTTP API that any client uses.

about.py    which conversation fits the model that is served, and how long its generation header is
script.py   what is asked, the tools, and the tool that runs here
client.py   one streamed chat completion: text, tool calls, usage
report.py   the figures of a turn, and what they must satisfy
run.py      start the stack, hold the chat, compare, stop, print the result
"""
