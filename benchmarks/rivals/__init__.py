"""What Meshwright is measured beside: other libraries, and programs written by hand."""
