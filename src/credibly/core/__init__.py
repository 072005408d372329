"""What everything else stands on: inputs, random streams, specs, autodiff, compilation, progress."""
