"""The whole line: `burstline up` as a user would run it, spoken to over HTTP."""
