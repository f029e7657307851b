"""Reports: tables, figures and an HTML page from run folders. Nothing is trained here."""
