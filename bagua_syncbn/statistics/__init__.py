"""Statistics of models: masks, and running statistics accumulated, frozen, merged or recalibrated."""
