"""Networks: parameters as one flat vector, normalisation, dropout masks, memory layout, the zoo, blueprints as JSON."""
