"""The fault injector's pure parts."""
