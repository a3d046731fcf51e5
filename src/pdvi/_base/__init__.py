"""What every part stands on: types, checks of arguments, files written whole, words on a console. Nothing of pdvi."""
