"""When a training saves, what it saves, and how it resumes."""
