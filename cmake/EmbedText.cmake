# Makes a text file a string literal of C++, for #include: libposembed reads its tables without files beside it.
function(posembed_embed_text file literal)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(READ ${file} text)
  file(CONFIGURE OUTPUT ${literal} CONTENT "R\"text(\${text})text\"\n")
endfunction()
