"""From run folders to tables, pictures and one HTML page; never trains."""
