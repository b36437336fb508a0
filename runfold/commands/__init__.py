"""The commands of `runfold`, a module for each kind of user's errand."""
