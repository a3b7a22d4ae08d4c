"""A web page that shows runs. It reads run directories, and is never inside a run."""
