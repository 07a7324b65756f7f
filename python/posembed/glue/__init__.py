"""What torch asks of a library: tracers, fake kernels, vmap, DTensors, decompositions."""
