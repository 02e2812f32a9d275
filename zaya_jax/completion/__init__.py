"""What shells are told of `zaya`, so that they complete its words."""
