"""What two services agree on, module by module."""
