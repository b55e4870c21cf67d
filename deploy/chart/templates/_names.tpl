{{- /* What InstallOptions.config_map is: the ConfigMap with the agents' configuration; empty: none. */}}
{{- define "node-agent.configMap" -}}
{{ .Values.agent.configMap | default (ternary "node-agent-config" "" (not (empty .Values.configuration))) }}
{{- end }}

{{- /* A text as an environment variable gets it: of `$(NAME)` Kubernetes makes a variable, of `$$` a `$`. */}}
{{- define "node-agent.literal" -}}
{{ . | default "" | replace "$" "$$" }}
{{- end }}

{{- /* Metadata of an object in the release's namespace, by its name. */}}
{{- define "node-agent.metadata" -}}
name: {{ quote .name }}
namespace: {{ quote .root.Release.Namespace }}
labels:
  app.kubernetes.io/part-of: node-agent
{{- end }}

{{- /* The pull secrets, as pods and accounts have them. */}}
{{- define "node-agent.pullSecrets" -}}
{{- with .Values.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ quote . }}
  {{- end }}
{{- end }}
{{- end }}

{{- /* The fields that the schema of a definition in the cluster has, and that of ours has not. */}}
{{- define "node-agent.newFields" -}}
{{- $ours := .ours.properties | default dict }}
{{- range $name, $field := .found.properties }}
{{- if hasKey $ours $name }}{{ include "node-agent.newFields" (dict "found" $field "ours" (get $ours $name)) }}
{{- else }}{{ $name }} {{ end }}
{{- end }}
{{- if and .found.items .ours.items }}{{ include "node-agent.newFields" (dict "found" .found.items "ours" .ours.items) }}{{ end }}
{{- end }}

{{- /* The fields and versions that a definition in the cluster has, and ours has not. */}}
{{- define "node-agent.newer" -}}
{{- range $version := dig "spec" "versions" list .found }}
{{- $same := list }}
{{- range $.ours.spec.versions }}{{ if eq .name $version.name }}{{ $same = append $same . }}{{ end }}{{ end }}
{{- if $same }}
{{- include "node-agent.newFields" (dict "found" $version.schema.openAPIV3Schema "ours" (first $same).schema.openAPIV3Schema) }}
{{- else if $version.served }}{{ $version.name }} {{ end }}
{{- end }}
{{- end }}

{{- /*
The definitions that this release may write, as a JSON list: not those that something else has created, and none that
is newer, whose fields it would remove from the objects of all namespaces.
*/}}
{{- define "node-agent.definitions" -}}
{{- $definitions := list }}
{{- range $path, $content := .Files.Glob "files/crds/*.yaml" }}
{{- $definition := $.Files.Get $path | fromYaml }}
{{- $found := lookup "apiextensions.k8s.io/v1" "CustomResourceDefinition" "" $definition.metadata.name }}
{{- $owner := dig "metadata" "annotations" dict $found }}
{{- $name := get $owner "meta.helm.sh/release-name" }}
{{- $namespace := get $owner "meta.helm.sh/release-namespace" }}
{{- $own := and (eq $name $.Release.Name) (eq $namespace $.Release.Namespace) }}
{{- if or (not $found) (and $own (not (include "node-agent.newer" (dict "found" $found "ours" $definition)))) }}
{{- $_ := set $definition.metadata "annotations" (dict "helm.sh/resource-policy" "keep") }}
{{- $definitions = append $definitions $definition }}
{{- end }}
{{- end }}
{{- toJson $definitions }}
{{- end }}

{{- /* The resources of a container, without the quantities that are 0, or null: Kubernetes takes null for 0. */}}
{{- define "node-agent.resources" -}}
{{- range $section, $quantities := dict
      "requests" (dict "cpu" .cpuRequest "memory" .memoryRequest)
      "limits" (dict "cpu" .cpuLimit "memory" .memoryLimit) }}
{{- range $resource, $quantity := $quantities }}
{{- if has $quantity (list "0" "" nil) }}{{ $quantities = omit $quantities $resource }}{{ end }}
{{- end }}
{{- with $quantities }}
{{ $section }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{- /*
How the location is created. Helm rejects an object whose definition the same release creates: Helm 4 unless it is a
hook, Helm 3 always, since it reads the definitions only once. Without a cluster (helm template) there is no obstacle.
*/}}
{{- define "node-agent.locationForm" -}}
{{- if or (.Capabilities.APIVersions.Has "velero.io/v1/BackupStorageLocation") (not (lookup "v1" "Namespace" "" "default")) -}}
object
{{- else if semverCompare ">=4-0" .Capabilities.HelmVersion.Version -}}
hook
{{- else -}}
later
{{- end }}
{{- end }}
