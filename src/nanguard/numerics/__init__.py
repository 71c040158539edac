"""Pure tensor functions. None of them waits for the device."""
