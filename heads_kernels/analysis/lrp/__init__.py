"""Layer-wise relevance propagation through a model (Voita et al. 2019, section 4)."""
