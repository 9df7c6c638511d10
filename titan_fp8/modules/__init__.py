"""FP8 modules: linears, feed-forwards and experts, and how a model is converted to them."""
