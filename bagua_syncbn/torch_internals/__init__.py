"""All uses of undocumented parts of torch."""
