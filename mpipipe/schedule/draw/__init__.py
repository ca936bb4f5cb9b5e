"""Pictures of tables: text, PNG."""
