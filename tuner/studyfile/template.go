package studyfile

import _ "embed"

//go:embed template.yaml
var template string

// Template returns a commented study file to start from: a 70B model on one H200.
func Template() string { return template }
