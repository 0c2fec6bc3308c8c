{{- define "sordino.name" -}}
{{- printf "%s-%s" .Release.Name .Values.role | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "sordino.labels" -}}
app.kubernetes.io/name: sordino
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .Values.role }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "sordino.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "sordino.pod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.user }}
  runAsGroup: {{ .Values.user }}
  fsGroup: {{ .Values.user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
automountServiceAccountToken: false
{{- with .Values.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- if .Values.folder.secret }}
initContainers:
  - name: folder
    image: {{ include "sordino.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command:
      - sh
      - -ec
      - |
        umask 077
        [ -e /data/.copied ] && exit 0
        cp -L /secret/* /data/
        {{- if eq .Values.role "coordinator" }}
        mkdir -p /data/nodes
        mv /data/*.pub /data/nodes/
        {{- end }}
        touch /data/.copied
    securityContext: {{ include "sordino.security" . | nindent 6 }}
    volumeMounts:
      - {name: folder, mountPath: /data}
      - {name: secret, mountPath: /secret, readOnly: true}
{{- end }}
{{- end -}}

{{- define "sordino.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "sordino.environment" -}}
- {name: HOME, value: /home/sordino}
{{- if eq .Values.role "site" }}
- {name: XDG_STATE_HOME, value: /witness}
{{- end }}
{{- if .Values.proxy.https }}
- {name: HTTPS_PROXY, value: {{ .Values.proxy.https | quote }}}
- {name: NO_PROXY, value: {{ printf "127.0.0.1,localhost%s" (.Values.proxy.exceptions | empty | ternary "" (printf ",%s" .Values.proxy.exceptions)) | quote }}}
{{- end }}
{{- end -}}

{{- define "sordino.volumes" -}}
- name: folder
  persistentVolumeClaim:
    claimName: {{ .Values.folder.volume.existingClaim | default (include "sordino.name" .) }}
- {name: tmp, emptyDir: {}}
- {name: home, emptyDir: {}}
{{- if .Values.folder.secret }}
- name: secret
  secret: {secretName: {{ .Values.folder.secret | quote }}}
{{- end }}
{{- end -}}
