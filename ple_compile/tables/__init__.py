"""Where n-gram tables live: finding them in a model, and keeping them in page-locked host memory."""
