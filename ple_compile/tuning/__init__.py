"""Launch choices of the kernels: those that are shipped, those of the user's GPU, and the search for them."""
