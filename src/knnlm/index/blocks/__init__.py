"""An int8 block index for CPUs."""
