"""What a store of a given size costs: bytes, time, memory, and a layout for given hardware."""
