"""What callers give: sampling parameters, and the arguments of other libraries by their names here. No torch."""
