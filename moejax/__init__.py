"""moejax: vectorized batch sweeps of Mixture-of-Experts inference on memory-centric hardware."""
