"""The wire bytes of every message version, one .hex file each."""
