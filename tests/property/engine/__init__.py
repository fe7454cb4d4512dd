"""The engine under random walks: one stream whatever the company, books that balance, pools at their baseline."""
