"""Where sdcontrol meets other libraries."""
