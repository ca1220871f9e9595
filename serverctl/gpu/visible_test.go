package gpu

import (
	"slices"
	"testing"
)

func TestVisible(t *testing.T) {
	gpus := []GPU{
		{Index: 0, UUID: "GPU-8932f937-d72c"}, {Index: 1, UUID: "GPU-46ed1cc9-0001"}, {Index: 2, UUID: "GPU-46ed1cc9-0002", MIG: "enabled"},
	}
	const unset = "-"
	for _, row := range []struct {
		name         string
		cuda, nvidia string
		want         []int // indices of the visible GPUs
	}{
		{"nothing set shows all", unset, unset, []int{0, 1, 2}},
		{"indices pick, in their order", "2,0", unset, []int{2, 0}},
		{"spaces do not matter", " 1 , 2 ", unset, []int{1, 2}},
		{"an index named twice is one GPU", "1,1", unset, []int{1}},
		{"empty is none", "", unset, nil},
		{"-1 is none", "-1", unset, nil},
		{"none and void are no indices, so none", "void", unset, nil},
		{"the first word that means nothing ends the list", "1,7,0", unset, []int{1}},
		{"a whole UUID", "GPU-46ed1cc9-0001", unset, []int{1}},
		{"the beginning of a UUID", "GPU-8932f937", unset, []int{0}},
		{"the beginning of two UUIDs means neither", "GPU-46ed1cc9", unset, nil},
		{"a UUID that is not there", "GPU-dead", unset, nil},
		{"an instance means its divided device", "MIG-f8ed8f9c-0000", unset, []int{2}},
		{"an instance by its old name", "MIG-GPU-8932f937-d72c/1/0", unset, []int{0}},
		{"all takes nothing away", unset, "all", []int{0, 1, 2}},
		{"the runtime's indices were applied before we look", unset, "5", []int{0, 1, 2}},
		{"void stands in containers that got their GPUs by CDI", unset, "void", []int{0, 1, 2}},
		{"so does an empty list", unset, "", []int{0, 1, 2}},
		{"none is none", unset, "none", nil},
		{"UUIDs pick from the node's GPUs", unset, "GPU-46ed1cc9-0002,GPU-8932f937-d72c", []int{0, 2}},
		{"UUIDs that are not there", unset, "GPU-dead", nil},
		{"CUDA's indices count what the runtime let in", "1", "GPU-46ed1cc9-0002,GPU-8932f937-d72c", []int{2}},
	} {
		t.Run(row.name, func(t *testing.T) {
			lookupEnv := func(name string) (string, bool) {
				value := map[string]string{"CUDA_VISIBLE_DEVICES": row.cuda, "NVIDIA_VISIBLE_DEVICES": row.nvidia}[name]
				return value, value != unset
			}
			var got []int
			for _, g := range Visible(Reading{GPUs: gpus}, lookupEnv) {
				got = append(got, g.Index)
			}
			if !slices.Equal(got, row.want) {
				t.Errorf("Visible() = %v, want %v", got, row.want)
			}
		})
	}
}
