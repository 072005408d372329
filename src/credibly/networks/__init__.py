"""Networks: a module as one flat vector, normalisation policy, dropout masks, memory layout, the zoo, architectures as JSON."""
