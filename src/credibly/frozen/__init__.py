"""The frozen body of a network: what depends on no random parameter, computed once per row."""
