"""posteriordb's posteriors as plain densities: default NUTS and HMC against reference draws, beside BlackJAX's NUTS."""
