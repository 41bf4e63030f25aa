"""Types of request fields, and fields that several endpoints share."""
