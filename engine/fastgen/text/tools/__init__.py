"""Tool calls as models write them: how each format is read as it comes, and how it is enforced."""
