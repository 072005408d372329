"""The frozen body of a network: the part that depends on no random parameter, computed once per row."""
