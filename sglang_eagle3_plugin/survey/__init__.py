"""What each SGLang release does, found in its own files: classes by syntax tree, setters by executing them on stand-ins.

SGLang is never imported, nor is torch. ``archive`` reads a wheel or a tree, ``modules`` reduces each file to what matters,
``classes`` resolves names and inheritance among them, ``execute`` runs a release's own setter, ``facts`` puts a release together,
``matrix`` puts the releases together, ``wheels`` fetches them.
"""
