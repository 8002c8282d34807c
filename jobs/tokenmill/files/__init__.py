"""Files on shared storage: opened without following links, published atomically, hashed, and their errors explained."""
