"""The Hopper kernels (compute capability 9.0a), in Gluon."""
